"""The product's own documentation: Markdown files in templates/docs, served as pages."""
