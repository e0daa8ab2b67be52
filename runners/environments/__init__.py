"""Named environments of a host: interpreters with other packages than the agent's own.

``<name>.txt`` beside this file pins every package of one. It is built below the host's folder
when it is first needed, whole or not at all; what runs in it is started with its interpreter,
and nothing else ever imports from it.
"""
