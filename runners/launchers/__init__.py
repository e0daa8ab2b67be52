"""How a claimed attempt becomes processes: on this machine, or through a cluster's scheduler."""
