"""Named environments of a host: virtual environments with other packages than the agent's.

``<name>.txt`` next to this file pins every package of one. It is built atomically below the
host's folder when first needed; jobs run in it with its interpreter, and nothing else imports
from it.
"""
