"""Counts of XLA's programs agree with counts by hand."""

import pytest

from tfmix.tools.hardware import compiled_text

GPU = """HloModule jit_step

%fused (p.0: f16[8,64]) -> f16[8,64] {
  %p.0 = f16[8,64]{1,0} parameter(0)
  ROOT %n = f16[8,64]{1,0} negate(%p.0)
}

%gemm (a: f16[8,64], b: f16[64,16]) -> f32[8,16] {
  %a = f16[8,64]{1,0} parameter(0)
  %b = f16[64,16]{1,0} parameter(1)
  ROOT %dot.1 = f32[8,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}, \
rhs_contracting_dims={0}, metadata={op_name="jit(step)/jvp(first)/dot"}
}

%then (t: f32[8,16]) -> f32[8,16] {
  %t = f32[8,16]{1,0} parameter(0)
  ROOT %copy.9 = f32[8,16]{1,0} copy(%t)
}

%else (e: f32[8,16]) -> f32[8,16] {
  ROOT %e = f32[8,16]{1,0} parameter(0)
}

ENTRY %main (x: f16[8,64], w: f16[64,16], flag: pred[]) -> f32[8,16] {
  %x = f16[8,64]{1,0} parameter(0)
  %w = f16[64,16]{1,0} parameter(1)
  %flag = pred[] parameter(2)
  %loop = f16[8,64]{1,0} fusion(%x), kind=kLoop, calls=%fused
  %product = f32[8,16]{1,0} fusion(%loop, %w), kind=kCustom, calls=%gemm, \
backend_config={"fusion_backend_config":{"kind":"__triton_gemm"}}
  %lt = (f16[8,16]{1,0}, s8[32]{0}) custom-call(%loop, %w), \
custom_call_target="__cublas$lt$matmul", backend_config={"dot_dimension_numbers\
":{"lhs_contracting_dimensions":["1"],"lhs_batch_dimensions":[]}}
  ROOT %c = f32[8,16]{1,0} conditional(%flag, %product, %product), \
true_computation=%then, false_computation=%else
}
"""


def test_launches_copies_and_branches_are_counted():
    program = compiled_text.read(GPU)
    assert program.kernels == 3
    assert program.copies == 1, "only the copy inside the branch counts"
    assert program.conditionals == 1


def test_bytes_are_read_and_written_by_kernels_and_copies():
    x, w, out = 8 * 64 * 2, 64 * 16 * 2, 8 * 16 * 4
    library = 8 * 16 * 2  # its workspace does not count
    expected = (x + x) + (x + w + out) + (x + w + library) + 2 * out
    assert compiled_text.read(GPU).bytes == expected


def test_a_product_has_label_shape_dtype_and_kernel():
    first, second = compiled_text.read(GPU).products
    assert first.label == "jit(step)/jvp(first)/dot"
    assert (first.shape, first.count) == ((8, 64, 16), 1)
    assert (first.dtype, first.kernel) == ("float16", "Triton")
    assert first.flops == 2 * 8 * 64 * 16
    assert (second.kernel, second.shape) == ("cuBLAS", (8, 64, 16))


WINDOW = "window={size=2x2}, "
SAME = "window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f"
# XLA writes `(32, 128, 64) @ (32, 64, 16)` like this for a TPU.
BATCHED = "window={size=32 stride=31 lhs_dilate=32}, dim_labels=0bf_0io->0bf"
GROUPS = WINDOW + "dim_labels=b01f_01io->b01f, feature_group_count=6"
CUDNN = WINDOW + 'dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$conv'


@pytest.mark.every_case("each is a rule of its own, and fast")
@pytest.mark.parametrize(
    ("operation", "sizes", "more", "shape", "count", "flops"),
    [
        (
            *("convolution", ("2,5,5,4", "3,3,4,8", "2,5,5,8"), SAME),
            *((2 * 5 * 5, 9 * 4, 8), 1, 2 * 50 * 36 * 8),
        ),
        (
            *("convolution", ("2,4,4,6", "2,2,1,6", "2,3,3,6"), GROUPS),
            *((2 * 9, 4, 1), 6, 2 * 18 * 4 * 6),
        ),
        (
            *("convolution", ("32,128,64", "32,64,16", "32,128,16"), BATCHED),
            *(None, None, 2 * 32 * 128 * 64 * 16),
        ),
        (
            *("custom-call", ("2,3,3,8", "8,2,2,4", "2,4,4,4")),
            *(f'{CUDNN}BackwardInput"', (18, 8, 16), 1, 2 * 18 * 16 * 8),
        ),
        (
            *("custom-call", ("2,4,4,4", "2,3,3,8", "8,2,2,4")),
            *(f'{CUDNN}BackwardFilter"', (16, 18, 8), 1, 2 * 18 * 16 * 8),
        ),
    ],
    ids=[
        "taps beyond the edges count as well",
        "groups are separate products",
        "a dilation that separates batches counts no zeros",
        "the gradient of an input",
        "the gradient of a kernel",
    ],
)
def test_the_work_of_a_convolution(operation, sizes, more, shape, count, flops):
    inputs, kernel, outputs = sizes
    (found,) = compiled_text.read(
        f"ENTRY %main (a: f32[]) -> f32[] {{\n"
        f"  %a = bf16[{inputs}]{{0}} parameter(0)\n"
        f"  %b = bf16[{kernel}]{{0}} parameter(1)\n"
        f"  ROOT %c = bf16[{outputs}]{{0}} {operation}(%a, %b), {more}\n"
        "}\n"
    ).products
    assert found.flops == flops
    if shape:
        assert (found.shape, found.count) == (shape, count)
    assert (found.kernel == "cuDNN") is (operation == "custom-call")


def test_data_that_a_tpu_fetches_counts_once():
    inside = "f32[8,64]{1,0:T(8,128)S(1)}"
    whole, half = 4 * 8 * 64, 4 * 4 * 64
    program = compiled_text.read(
        "%fused (p: f32[8,64]) -> f32[8,64] {\n"
        "  %p = f32[8,64]{1,0} parameter(0)\n"
        "  ROOT %n = f32[8,64]{1,0} negate(%p)\n"
        "}\n\n"
        "ENTRY %main (a: f32[8,64]) -> f32[8,64] {\n"
        "  %a = f32[8,64]{1,0:T(8,128)} parameter(0)\n"
        f"  %cs = ({inside}, f32[8,64]{{1,0}}, u32[]{{:S(2)}}) copy-start(%a)\n"
        f"  %cd = {inside} copy-done(%cs)\n"
        "  %ss = ((f32[8,64]{1,0}), f32[4,64]{1,0:T(8,128)S(1)}, s32[]{:S(2)}) "
        "slice-start(%a), slice={[0:4], [0:64]}\n"
        f"  %one = {inside} fusion(%cd), kind=kLoop, calls=%fused\n"
        "  ROOT %two = f32[8,64]{1,0} fusion(%one), kind=kLoop, calls=%fused\n"
        "}\n"
    )
    assert program.bytes == whole + half + 0 + whole


def fused(root, *lines):
    """Returns the bytes of a fusion of a table, rows and indices."""
    kinds = ["f32[1000,64]{1,0}", "f32[8,64]{1,0}", "s32[8,1]{1,0}"]
    given = "".join(
        f"  %p{index} = {kind} parameter({index})\n"
        for index, kind in enumerate(kinds)
    )
    result = root.split(" = ")[1].split(" ")[0]
    return compiled_text.read(
        f"%fused (p0: f32[1000,64]) -> f32[] {{\n{given}"
        + "".join(f"  {line}\n" for line in lines)
        + f"  ROOT {root}\n}}\n\n"
        f"ENTRY %main (p0: f32[1000,64]) -> f32[] {{\n{given}"
        f"  ROOT %f = {result} fusion(%p0, %p1, %p2), kind=kLoop, "
        "calls=%fused\n}\n"
    ).bytes


ROWS, PLACES, TABLE = 4 * 8 * 64, 4 * 8, 4 * 1000 * 64


def test_a_gather_reads_only_its_rows_of_a_table():
    gathered = "%g = f32[8,64]{1,0} gather(%p0, %p2), offset_dims={1}"
    added = "%s = f32[8,64]{1,0} add(%g, %p1)"
    assert fused(added, gathered) == 3 * ROWS + PLACES
    # A table that another instruction reads as well is read as a whole.
    summed = "%r = f32[8,64]{1,0} custom(%p0, %s)"
    assert fused(summed, gathered, added) == TABLE + 2 * ROWS + PLACES


def test_a_scatter_reads_and_writes_only_its_rows_of_a_table():
    scattered = "%s = f32[1000,64]{1,0} scatter(%p0, %p2, %p1), to_apply=%add"
    assert fused(scattered) == 3 * ROWS + PLACES


LOOP = """HloModule step, is_scheduled=true

%body (state: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %state = (s32[], f32[8,8]) parameter(0)
  %count = s32[] get-tuple-element(%state), index=0
  %value = f32[8,8] get-tuple-element(%state), index=1
  %next = f32[8,8] add(%value, %value)
  ROOT %made = (s32[], f32[8,8]) tuple(%count, %next)
}

%condition (known: (s32[], f32[8,8])) -> pred[] {
  %known = (s32[], f32[8,8]) parameter(0)
  %at = s32[] get-tuple-element(%known), index=0
  %limit = s32[] constant(LIMIT)
  ROOT %less = pred[] compare(%at, %limit), direction=LT
}

ENTRY %main (given: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %given = (s32[], f32[8,8]) parameter(0)
  ROOT %loop = (s32[], f32[8,8]) while(%given), condition=%condition, body=%body
}
"""


@pytest.mark.parametrize(
    ("limit", "rounds", "is_open"), [(7, 7, 0), (2**31 - 1, 1, 1)]
)
def test_a_loop_counts_its_rounds_once_if_nothing_limits_them(
    limit, rounds, is_open
):
    program = compiled_text.read(LOOP.replace("LIMIT", str(limit)))
    assert program.kernels == rounds
    assert program.open_loops == is_open
