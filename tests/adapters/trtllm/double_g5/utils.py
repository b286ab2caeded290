"""Switches of the engine's own replay."""

import os


def is_gdn_replay_enabled():
    return os.environ.get("TRTLLM_USE_GDN_REPLAY", "1") != "0"
