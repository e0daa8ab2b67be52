"""Models of teams: configs, folders on hosts, artefacts of jobs."""
