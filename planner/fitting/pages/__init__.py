"""The generated documentation pages on accuracy and quality."""
