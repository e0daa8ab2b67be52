"""Facts with unit, source and date: models, devices and engines, each in its own data file."""
