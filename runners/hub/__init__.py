"""Models and data sets of a hub by name: looked up, downloaded, verified, kept.

The hub is Hugging Face's, or a mirror of it; models may be of another ``source``, such as
``modelscope``.

``names`` reads what people type, ``listing`` asks the Hub what a repository holds, ``selection``
and ``data_files``, which has ``cards``, choose the files that a job reads, ``store`` and
``splits`` say which of them are there, ``download`` fetches the rest. Everything that fails is a
``HubError`` with a kind. Without torch and Django.

A repository's code and its pickles are never fetched.
"""
