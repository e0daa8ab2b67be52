"""Models and data sets of the Hugging Face Hub by name: looked up, downloaded, verified, kept.

``names`` reads what people type, ``listing`` asks the Hub what a repository holds, ``selection``
and ``data_files``, which has ``cards``, choose the files that a job reads, ``store`` and
``splits`` say which of them are there, ``download`` fetches the rest. Everything that fails is a
``HubError`` with a kind. Without torch and Django.

A repository's code and its pickles are never fetched.
"""
