"""Published figures of accelerators, which need not be attached."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from tfmix import _arguments, _tables
from tfmix.policy.devices import describe, suited_policy

_TERA, _GIB, _MIB = 1e12, 2**30, 2**20


@dataclasses.dataclass(frozen=True)
class Target:
    """One kind of accelerator, with its maker's published figures.

    Attributes:
        name: The name for `compile_for`, `"h200"` for example.
        kind: `"GPU"` or `"TPU"`.
        title: The maker's own name.
        memory: Bytes of one device.
        bandwidth: Bytes per second between a device and its memory.
        rates: Operations per second in matrix products, by dtype. XLA computes
            a missing dtype in another one.
        capability: A GPU's compute capability, `(9, 0)` for example.
    """

    name: str
    kind: str
    title: str
    memory: int
    bandwidth: float
    rates: Mapping[str, float]
    capability: tuple[int, int] | None = None

    def auto(self) -> str:
        """Returns the policy of `"auto"` on this accelerator."""
        device = describe(self.kind, self.title, "", self.capability)
        return suited_policy((device,))[0]


class Targets(tuple[Target, ...], _tables.Printed):
    """A tuple of `Target` records that prints as a table."""

    def tables(self) -> list[_tables.Table]:
        """Returns the table to print, with rates in 10^12 operations/s."""
        rows = [
            (
                target.name,
                target.title.removeprefix("NVIDIA "),
                f"{target.memory / _GIB:.0f}",
                f"{target.bandwidth / _TERA:.2f}",
                *(
                    f"{target.rates[dtype] / _TERA:.0f}"
                    if dtype in target.rates
                    else "-"
                    for dtype in _DTYPES
                ),
            )
            for target in self
        ]
        heads = ("target", "name", "GiB", "TB/s")
        return [
            _tables.Table(
                (*heads, *_DTYPES),
                rows,
                notes=["Rates are of matrix products, in 10^12 operations/s."],
            )
        ]


def targets() -> Targets:
    """Lists the accelerators that `compile_for` can compile for.

    Returns:
        A tuple of frozen `Target` records, which prints as a table: first
        GPUs, then TPUs, the oldest first.

    Examples:
        >>> [target.name for target in targets()][:4]
        ['v100', 't4', 'a100-40gb', 'a100']
    """
    return Targets(_TARGETS.values())


def find(name: str) -> Target:
    """Returns the target of a name.

    Raises:
        ValueError: If there is no such target.
    """
    target = _TARGETS.get(str(name).lower())
    if target is None:
        hint = _arguments.did_you_mean(str(name).lower(), list(_TARGETS))
        raise ValueError(
            f"`target` must be one of {sorted(_TARGETS)!r}. Received: "
            f"target={name!r}.{hint}"
        )
    return target


def config(target: Target) -> str:
    """Returns a GPU's description for XLA's compiler.

    It is the text of a `stream_executor.GpuTargetConfigProto`.
    """
    (major, minor), cores, cache, clock = _CHIPS[target.name]
    threads, fpus, shared = _CORES[major, minor]
    figures = {
        **_ANY_GPU,
        "threads_per_core_limit": threads,
        "fpus_per_core": fpus,
        "shared_memory_per_core": shared * 1024,
        # From Ampere on, the system keeps one KiB of each block.
        "shared_memory_per_block_optin": (shared - (major >= 8)) * 1024,
        "core_count": cores,
        "l2_cache_size": int(cache * _MIB),
        "clock_rate_ghz": clock,
    }
    # Hopper and Blackwell have special units for wide products.
    own = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    fields = "\n  ".join(f"{name}: {value}" for name, value in figures.items())
    return f"""gpu_device_info {{
  {fields}
  memory_bandwidth: {int(target.bandwidth)}
  device_memory_size: {target.memory}
  cuda_compute_capability {{ major: {major} minor: {minor}{own} }}
  driver_version: "13.0.0"
  runtime_version: "12.9.0"
  compile_time_toolkit_version: "12.9.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{target.title}"
"""


# All GPUs share these figures of XLA's description.
_ANY_GPU: dict[str, float] = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "shared_memory_per_block": 49152,
    "registers_per_core_limit": 65536,
    "registers_per_block_limit": 65536,
    "block_dim_limit_x": 2147483647,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
}
# These are the threads, float32 units and KiB of shared memory of one core
# (SM), by compute capability, from the tables of the CUDA programming guide.
_CORES = {
    (7, 0): (2048, 64, 96),
    (7, 5): (1024, 64, 64),
    (8, 0): (2048, 64, 164),
    (8, 6): (1536, 128, 100),
    (8, 9): (1536, 128, 100),
    (9, 0): (2048, 128, 228),
    (10, 0): (2048, 128, 228),
    (12, 0): (1536, 128, 100),
}
# These are the compute capability, the cores, MiB of L2 cache and the highest
# clock in GHz of each GPU, from NVIDIA's white papers.
_CHIPS = {
    "v100": ((7, 0), 80, 6, 1.53),
    "t4": ((7, 5), 40, 4, 1.59),
    "a100-40gb": ((8, 0), 108, 40, 1.41),
    "a100": ((8, 0), 108, 40, 1.41),
    "rtx3090": ((8, 6), 82, 6, 1.695),
    "a10g": ((8, 6), 80, 6, 1.71),
    "h100": ((9, 0), 132, 50, 1.98),
    "rtx4090": ((8, 9), 128, 72, 2.52),
    "l4": ((8, 9), 58, 48, 2.04),
    "l40s": ((8, 9), 142, 96, 2.52),
    "h200": ((9, 0), 132, 50, 1.98),
    "b200": ((10, 0), 148, 126.5, 1.965),
    "rtx5090": ((12, 0), 170, 96, 2.407),
}
_DTYPES = ("float32", "float16", "bfloat16", "float8", "int8")
# A line holds a target's name, bytes of memory as the driver reports them, TB/s
# of bandwidth, TFLOP/s of products in each of `_DTYPES`, and the maker's name.
# Products are without sparsity and summed in float32. The figures come from the
# makers' data sheets and white papers, which docs/hardware-you-do-not-have.md
# lists. For float32, XLA uses TF32 on GPUs from Ampere on, and numbers rounded
# to bfloat16 on a TPU. The ordinary units of a V100 compute int8, four products
# at a time.
_FIGURES = """
v100       16935682048 0.898   15.7    125      -      -   62.8 V100 SXM2 16 GB
t4         15843721216 0.320    8.1     65      -      -    130 T4 16 GB
a100-40gb  42298834944 1.555    156    312    312      -    624 A100 SXM 40 GB
a100       85100068864 2.039    156    312    312      -    624 A100 SXM 80 GB
rtx3090    25447170048 0.936   35.6     71     71      -    284 RTX 3090 24 GB
a10g       23684186112 0.600     35     70     70      -    140 A10G 24 GB
h100       84942979072 3.352  494.7  989.4  989.4 1978.9 1978.9 H100 SXM 80 GB
rtx4090    25393692672 1.008   82.6  165.2  165.2  330.3  660.6 RTX 4090 24 GB
l4         23795335168 0.300     60    121    121  242.5  242.5 L4 24 GB
l40s       47803531264 0.864    183    362    362    733    733 L40S 48 GB
h200      151397597184 4.800  494.7  989.4  989.4 1978.9 1978.9 H200 SXM 141 GB
b200      191514411008 7.672   1125   2250   2250   4500   4500 B200 180 GB
rtx5090    33677180928 1.792  104.8  209.5  209.5    419    838 RTX 5090 32 GB
v4         34359738368 1.228    275      -    275      -    275 TPU v4
v5e        17179869184 0.819    197      -    197      -    394 TPU v5e
v5p       102005473280 2.765    459      -    459      -    918 TPU v5p
v6e        34359738368 1.640    918      -    918      -   1836 TPU v6e
"""


def _read(line: str) -> Target:
    name, memory, bandwidth, *rates, title = line.split(maxsplit=8)
    is_gpu = name in _CHIPS
    return Target(
        name,
        "GPU" if is_gpu else "TPU",
        f"NVIDIA {title}" if is_gpu else title,
        int(memory),
        float(bandwidth) * _TERA,
        MappingProxyType(
            {
                dtype: float(rate) * _TERA
                for dtype, rate in zip(_DTYPES, rates, strict=True)
                if rate != "-"
            }
        ),
        _CHIPS[name][0] if is_gpu else None,
    )


_TARGETS = {
    target.name: target for target in map(_read, _FIGURES.strip().splitlines())
}
