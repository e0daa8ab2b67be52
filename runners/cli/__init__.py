"""The command line ``slipway``: plan, look up, export and check, with or without a server.

- ``main``       the program: its commands by name, errors as exit codes
- ``groups``     groups of commands, also of those that are made when they are used
- ``plan``       ``slipway plan GOAL MODEL``: the command of each goal
- ``plan_options`` which options it has: names and the request's field
- ``option_fields`` a field as an option: how its text is read, and its help
- ``plan_request`` the request that model, options and ``--set`` make
- ``settings``   ``--set FIELD=VALUE``
- ``plans``      plans kept on this machine; ``slipway export`` and ``slipway explain``
- ``hardware``   what ``--on`` names: catalog devices, cloud offers, this machine
- ``catalog``    ``slipway models`` and ``slipway devices``
- ``bench``      ``slipway bench``: a load test of any OpenAI-compatible endpoint
- ``doctor``     ``slipway doctor``: checks of this machine, each with a remedy
- ``completion`` ``slipway completion``: scripts for shells
- ``report``     a plan as text: figures, alternatives, reasons
- ``output``     tables, JSON, YAML, numbers with units
- ``config``     the user's configuration: server and token
- ``quantities`` durations, sizes and counts as people write them
- ``errors``     the error of a command, its exit code and its problem document

Start-up counts: a module here imports the planner, rich or httpx only within the function that
needs it, but for what its options are made of.
"""
