"""Counts the kernels, products and copies of a compiled training step."""

import dataclasses

from tfmix.tools.hardware import hlo_products, hlo_text, hlo_traffic


@dataclasses.dataclass(frozen=True)
class Program:
    """The counts of a program of XLA.

    A loop's body counts as often as it runs, and once if that depends on data.

    Attributes:
        kernels: Launches that compute something.
        copies: Copies in the device's memory.
        conditionals: Branches; at these a GPU waits for the host.
        bytes: Bytes that are read and written in the device's memory. Data
            that a TPU fetches into its on-chip memory counts once, when it is
            fetched. Gathers and scatters count the rows that they use.
        products: Matrix products and convolutions, with the operations of all
            rounds of a loop.
        open_loops: Loops whose body counts once, because the number of rounds
            depends on data.
    """

    kernels: int
    copies: int
    conditionals: int
    bytes: int
    products: tuple[hlo_products.Product, ...]
    open_loops: int


def read(text: str) -> Program:
    """Reads a compiled program in XLA's text form."""
    computations, entry = hlo_text.parse(text)
    times = hlo_text.times(entry, computations)
    steps = hlo_text.stepwise(entry, computations)
    run = [
        (instruction, computations[name], times[name])
        for name in steps
        for instruction in computations[name].values()
    ]
    return Program(
        kernels=sum(
            n for instruction, _, n in run if hlo_traffic.is_kernel(instruction)
        ),
        copies=sum(
            n for instruction, _, n in run if hlo_traffic.is_copy(instruction)
        ),
        conditionals=sum(n for x, _, n in run if x.operation == "conditional"),
        bytes=sum(
            n * hlo_traffic.moved_bytes(instruction, among, computations)
            for instruction, among, n in run
            if hlo_traffic.is_kernel(instruction)
            or hlo_traffic.is_transfer(instruction)
        ),
        products=tuple(hlo_products.products(computations, times)),
        open_loops=sum(
            hlo_text.rounds(instruction, computations) is None
            for instruction, _, _ in run
        ),
    )
