"""`replayssm bench`: timings of the kernels beside those of other packages, and of engines with them.

Needs torch alone, so that it also starts with `python -m replayssm.cli.bench` where the command's own
dependencies are not installed.
"""
