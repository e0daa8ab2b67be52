"""Facts with unit, source and date: models, devices and engines, one data file each."""
