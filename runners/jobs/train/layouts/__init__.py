"""The layouts of a training over ranks: each a module, all on one mesh."""
