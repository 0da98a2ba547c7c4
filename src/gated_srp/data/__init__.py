"""Feature files, tables, splits and cohorts (extra ``train``)."""

from gated_srp.data.bag import Bag, BagError, BagHeader
from gated_srp.data.encoders import canonical
from gated_srp.data.formats import read_bag, read_header
from gated_srp.data.siblings import find_bags

__all__ = [
    "Bag",
    "BagError",
    "BagHeader",
    "canonical",
    "find_bags",
    "read_bag",
    "read_header",
]
