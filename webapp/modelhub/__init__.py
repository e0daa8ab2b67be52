"""Models a team brought or made: configs, folders, artefacts of jobs."""
