"""How repositories of the Hub are named, for code that runs before anything is installed."""

DATA_SETS = "datasets/"  # before the name of a data set, as in the Hub's addresses
