"""The plan document: one model that pages, API, command line, imports and stored plans share."""
