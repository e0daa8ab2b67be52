"""How far one thing goes: longest context, most people, largest model, fewest devices."""
