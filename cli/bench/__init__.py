"""`replayssm bench`: timings of the kernels beside those of other packages, in one run.

Needs torch alone, so that it also starts with `python -m replayssm.cli.bench` where the command's own
dependencies are not installed.
"""
