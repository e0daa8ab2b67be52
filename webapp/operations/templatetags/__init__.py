"""Template tags that know the apps."""
