"""What GPU there would be."""


def get_sm_version():
    return 90
