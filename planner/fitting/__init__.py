"""The fit of the calibration factors to published measurements, and its validation.

The product reads the factors from ``planner/catalog/data``; only the commands that fit them or
write the accuracy page import this package.
"""
