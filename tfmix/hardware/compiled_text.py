"""Reads what a compiler made of a training step: kernels, products, copies."""

import dataclasses

from tfmix.hardware import hlo_products, hlo_text, hlo_traffic


@dataclasses.dataclass(frozen=True)
class Program:
    """What can be counted in a program.

    A loop's body counts as often as it runs, and once where only the data say.

    Attributes:
        kernels: Launches that compute something.
        copies: Copies in the device's memory.
        conditionals: Branches; a GPU's wait for the host.
        exchanges: Exchanges between devices.
        exchanged: Bytes that each device sends.
        bytes: Bytes of the device's memory that are read and written. What a
            TPU fetches into its own memory counts once, as it is fetched; of
            what is gathered and scattered, the rows.
        products: Matrix products and convolutions, with the operations of all
            rounds of a loop.
        open_loops: Loops whose body counts once, since only the data say.
    """

    kernels: int
    copies: int
    conditionals: int
    exchanges: int
    exchanged: int
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
    given = [(x, n) for x, _, n in run if x.operation in hlo_traffic.EXCHANGES]
    return Program(
        kernels=sum(
            n for instruction, _, n in run if hlo_traffic.is_kernel(instruction)
        ),
        copies=sum(
            n for instruction, _, n in run if hlo_traffic.is_copy(instruction)
        ),
        conditionals=sum(n for x, _, n in run if x.operation == "conditional"),
        exchanges=sum(n for _, n in given),
        exchanged=sum(
            n * hlo_traffic.given_bytes(instruction) for instruction, n in given
        ),
        bytes=sum(
            n * hlo_traffic.moved(instruction, among, computations)
            for instruction, among, n in run
            if hlo_traffic.is_kernel(instruction)
            or hlo_traffic.is_transfer(instruction)
        ),
        products=tuple(hlo_products.products(computations, times)),
        open_loops=sum(
            hlo_text.rounds(instruction, among, computations) is None
            for instruction, among, _ in run
        ),
    )
