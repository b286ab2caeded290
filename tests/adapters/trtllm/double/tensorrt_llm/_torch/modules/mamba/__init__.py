"""Recurrent layers."""

PAD_SLOT_ID = -1
