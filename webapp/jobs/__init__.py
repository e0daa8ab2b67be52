"""Jobs, attempts, events, artefacts, measurements."""
