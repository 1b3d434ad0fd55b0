"""mixassay: an assay of sequence mixers. Same procedure, many samples, a measured amount with an error."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("mixassay")
except PackageNotFoundError:  # a bare checkout on PYTHONPATH
    __version__ = "0+checkout"
