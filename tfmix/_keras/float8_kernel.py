"""Multiplies float8 matrices by the vendor's library."""

import functools
from collections.abc import Sequence
from typing import Any

import keras

from tfmix._keras import context, kernels

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf
else:
    import jax
    from jax.experimental import layout


def float8_product(
    a: Any, b: Any, transposed: tuple[bool, bool], dtype: str
) -> Any:
    """Multiplies two float8 matrices, each transposed first or not.

    On a GPU the algorithm is set to that of the vendor's library. Otherwise XLA
    compiles and times kernels of its own for each product, which takes minutes
    in a first step and gives slower kernels. On a single GPU both
    matrices are also stored row by row. Otherwise XLA stores a weight as its
    first product needs it, and another kernel transposes it for the next.

    Returns:
        The product, summed in float32. It is bfloat16 if `dtype` is, because
        the library returns that at once, and float32 otherwise.
    """
    dtype = "bfloat16" if dtype == "bfloat16" else "float32"
    axes = int(not transposed[0]), int(transposed[1])
    if keras.backend.backend() == "jax":
        default = functools.partial(
            jax.lax.dot_general,
            dimension_numbers=(((axes[0],), (axes[1],)), ((), ())),
            preferred_element_type=dtype,
        )
        by_library = functools.partial(
            default, precision=jax.lax.DotAlgorithmPreset[_BY_LIBRARY]
        )
        rows = layout.Layout((0, 1))

        def by_rows(*both: Any) -> Any:
            return by_library(*layout.with_layout_constraint(both, rows))

        # Devices that share a matrix would exchange it to store it by rows.
        on_gpu = kernels.by_target(
            single=by_rows,
            default=by_library,
            shaped=functools.partial(jax.eval_shape, default),
        )
        return jax.lax.platform_dependent(a, b, cuda=on_gpu, default=default)
    if not context.by_xla():
        # TensorFlow's own operations do not support float8.
        wide = tf.cast(a, tf.float32), tf.cast(b, tf.float32)
        return tf.cast(tf.matmul(*wide, *transposed), dtype)
    shape = a.shape[1 - axes[0]], b.shape[1 - axes[1]]
    types = [_stablehlo_type(x.shape, x.dtype.name) for x in (a, b)]
    types.append(_stablehlo_type(shape, dtype))
    layouts, factors, algorithm = "", "%a, %b", ""
    if context.for_gpu():
        layouts, factors = _STABLEHLO_BY_ROWS.format(*types), "%x, %y"
        narrow = [_STABLEHLO[x.dtype.name] for x in (a, b)]
        algorithm = _STABLEHLO_BY_LIBRARY.format(*narrow)
    from tensorflow.compiler.tf2xla.ops import gen_xla_ops

    (product,) = gen_xla_ops.xla_call_module(
        [a, b],
        version=9,
        module=_FLOAT8_PRODUCT.format(
            *types, layouts, factors, *axes, algorithm
        ),
        Sout=[list(shape)],
        Tout=[tf.as_dtype(dtype)],
        # The module holds nothing that depends on the platform.
        platforms=["CPU"],
        disabled_checks=["platform"],
        function_list=[],
        has_token_input_output=False,
    )
    return product


# The attribute leaves the batch size open until it is compiled.
_FLOAT8_PRODUCT = """module attributes {{jax.uses_shape_polymorphism = true}} {{
  func.func public @main(%a: {0}, %b: {1}) -> {2} {{{3}
    %c = stablehlo.dot_general {4}, contracting_dims = [{5}] x [{6}]{7}
      : ({0}, {1}) -> {2}
    return %c : {2}
  }}
}}"""
_STABLEHLO_BY_ROWS = "".join(
    f"""
    %{result} = stablehlo.custom_call @LayoutConstraint(%{matrix}) {{{{
      operand_layouts = [dense<[1, 0]> : tensor<2xindex>],
      result_layouts = [dense<[1, 0]> : tensor<2xindex>]
    }}}} : ({kind}) -> {kind}"""
    for matrix, result, kind in (("a", "x", "{0}"), ("b", "y", "{1}"))
)
# This algorithm multiplies any two float8 formats, and sums as Tensor Cores do
# by default. XLA has no kernels of its own for it, so it calls the library. JAX
# and StableHLO both have it.
_BY_LIBRARY = "ANY_F8_ANY_F8_F32_FAST_ACCUM"
_STABLEHLO_BY_LIBRARY = """, algorithm = <
      lhs_precision_type = {0}, rhs_precision_type = {1},
      accumulation_type = f32, lhs_component_count = 1,
      rhs_component_count = 1, num_primitive_operations = 1,
      allow_imprecise_accumulation = true>"""
_STABLEHLO = {
    "float8_e4m3fn": "f8E4M3FN",
    "float8_e5m2": "f8E5M2",
    "bfloat16": "bf16",
    "float32": "f32",
}


def _stablehlo_type(shape: Sequence, dtype: str) -> str:
    sides = ["?" if side is None else str(side) for side in shape]
    return f"tensor<{'x'.join([*sides, _STABLEHLO[dtype]])}>"
