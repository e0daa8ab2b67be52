"""How repositories of the Hub are named, for code that runs before anything is installed."""

DATA_SETS = "datasets/"  # before the name of a data set, as in the Hub's addresses
# Of the owner under which the cache of a host has what came from an object store. The Hub has no
# such owner: the names of its users and organisations have no dots.
STORE_PREFIX = "s3."
