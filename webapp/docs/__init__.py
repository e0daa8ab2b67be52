"""The product's documentation: Markdown files in templates/docs, served as pages."""
