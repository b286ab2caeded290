"""Backend-agnostic core: layer geometry, ring layout, flush policy, precision, cursors."""
