"""Units: binary and decimal multiples, and periods in seconds."""

KIB, MIB, GIB = 1024, 1024**2, 1024**3
GIGA, TERA = 1e9, 1e12
MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0
