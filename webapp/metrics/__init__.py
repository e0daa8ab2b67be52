"""The metric store: journal, sealed chunks, roll-ups."""
