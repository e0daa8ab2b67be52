"""The product seen in Chromium; a package, so that one product and one browser last for all."""
