"""`devices`: a table of the devices, and of what they compute fast."""

from tfmix import _tables
from tfmix.policy import devices as found


class Devices(tuple[found.Device, ...], _tables.Printed):
    """A tuple of `Device` records that prints as a table."""

    def tables(self) -> list[_tables.Table]:
        """Returns what to print."""
        speeds = ("not faster", "fast")
        rows = [
            (
                device.kind,
                device.name,
                ".".join(map(str, device.compute_capability or ())) or "-",
                speeds[device.float16],
                speeds[device.bfloat16],
                speeds[device.float8],
            )
            for device in self
        ]
        heads = ("kind", "name", "capability", "float16", "bfloat16", "float8")
        return [_tables.Table(heads, rows, notes=[self.auto()])]

    def auto(self) -> str:
        """Describes what `"auto"` is on these devices."""
        name, reason = found.suited_policy(self)
        return f"'auto' is '{name}' here: {reason}"


def devices() -> Devices:
    """Lists the devices Keras's backend computes on.

    Use it to see why `"auto"` chose what it chose.

    Returns:
        Accelerators first, then CPUs: a tuple of frozen `Device` records,
        which prints as a table.

    Examples:
        >>> "CPU" in {device.kind for device in devices()}
        True
    """
    return Devices(found.devices())
