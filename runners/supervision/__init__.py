"""Parts of the supervisor. Standard library only: it runs with site-packages switched off."""
