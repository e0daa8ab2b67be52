"""An object store that speaks S3, as a source of what jobs name by an address.

It has no repositories: ``objects`` makes the listing of what lies at an address, whose files have
signed addresses of their own. The rest is as for a hub: cache, ranges, digests, room, progress.
"""

from runners.hub.source import Source

STORE_ENVIRONMENT = "s3"  # of the library that asks the store and signs

S3 = Source(
    "s3",
    endpoint="https://s3.amazonaws.com",
    endpoint_variable='the "endpoint" of that prefix in the host\'s config.json',
    token_name="AWS_SECRET_ACCESS_KEY",  # noqa: S106 -- the variable's name
    link="store",
    title="the object store",
    ref_prefix="s3/",
    tells_code=False,
    runs_own_code=False,
    secrets=("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
)
