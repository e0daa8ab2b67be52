"""Pages: what people see and click, one file a subject."""
