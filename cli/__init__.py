"""The replayssm command line."""
