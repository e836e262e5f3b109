"""Sets the policy in `TFMIX_POLICY`, and reports when Python ends."""

import atexit
import dataclasses
import functools
import inspect
import json
import os
import pathlib
import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import keras
import rich.console

from tfmix import _messages
from tfmix._keras import context, layers, replacing
from tfmix.autocast import global_policy, layer_calls
from tfmix.policy import policy as policies
from tfmix.policy.devices import devices, suited_policy
from tfmix.tools.run import report, steps

POLICY, SETTINGS = "TFMIX_POLICY", "TFMIX_RUN"


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings with which `tfmix run` started the process."""

    file: str | None = None  # the file for the report as JSON
    is_json: bool = False  # true if JSON is printed instead of a table
    # The files of the runs to compare with and of those like this one, in
    # turns, as they ran. `sitecustomize` removes their folder at the end.
    before: tuple[str, ...] = ()
    is_quiet: bool = False  # true if a later run will print
    is_asked: bool = True  # true if it replaces the script's own policies
    # The policy of the next run, and whether that one is asked for.
    then: tuple[str, bool] | None = None
    first: str | None = None  # the file of the first run, for the second one
    seed: int | None = None  # what Python, NumPy and TensorFlow begin with
    process: int | None = None  # the process that `tfmix run` started
    unused: str | None = None  # a file to remove once Keras is used


def begin() -> None:
    """Trains this process with the policy in its environment."""
    settings = Settings(**json.loads(os.environ.get(SETTINGS, "{}")))
    name = os.environ[POLICY]
    try:
        _Session(name, settings).begin()
    except ValueError as error:
        raise ValueError(f"{error} It is what {POLICY} says.") from None


@dataclasses.dataclass(frozen=True)
class _Layer:
    """What is known of a layer."""

    kind: str
    dtype: str  # the compute dtype
    has_weights: bool
    fallen: str  # why it fell back, or ""


class _Session:
    def __init__(self, name: str, settings: Settings) -> None:
        self._settings, self._process = settings, os.getpid()
        policies.check_name(name)
        self._asked = name
        self._policy = policies.Policy(name)
        # The policies that the script sets itself, the latest at the end.
        self._by_script: dict[str, keras.DTypePolicy] = {}
        # The last of them that this run's policy replaced, or "".
        self._ignored = ""
        self._replacements = replacing.Replacements()
        # All layers, in the order in which they were created.
        self._layers: weakref.WeakKeyDictionary[Any, None] = (
            weakref.WeakKeyDictionary()
        )
        # The layers that were built, by class and path.
        self._found: dict[tuple, _Layer] = {}
        self._steps = steps.Steps(self._before_first, self._after_first)
        self._is_started_here = settings.process == self._process
        self._unused = settings.unused
        self._first = settings.first if self._is_started_here else None
        self._is_refused = False

    def begin(self) -> None:
        """Sets the policy, and watches the script."""
        global_policy.set_global_policy(self._policy)
        global_policy.decide_by(self._decide)
        self._replacements.set(
            {
                context.POLICY_STORE: self._store,
                (keras.Layer, "__init__"): self._initializer,
            }
        )
        self._steps.watch()
        atexit.register(self._end)

    def _decide(
        self, policy: keras.DTypePolicy, for_all: bool
    ) -> keras.DTypePolicy:
        """Returns the policy that replaces one that a script sets."""
        name = _name(policy)
        # A script in 16 bit may keep a part of its model in float32.
        is_part = not for_all or {*self._by_script} - {"float32"}
        self._by_script.pop(name, None)
        self._by_script[name] = policy
        if not self._settings.is_asked or (name == "float32" and is_part):
            return policy
        if name != _name(self._policy):
            self._ignored = name
        return self._policy

    def _store(self, original: types.ModuleType) -> types.ModuleType:
        """Makes the script set policies in tfmix rather than in Keras."""

        def save(name: str, value: Any) -> None:
            is_policy = name == context.POLICY_KEY and value is not None
            if is_policy and not global_policy.hooks_keras():
                if _is_new(value):
                    global_policy.set_global_policy(value)
                    return
                self._by_script.setdefault(_name(value), value)
            # The report names the policies that the script sets.
            with _messages.silenced():
                original.set_global_attribute(name, value)

        functions = {"set_global_attribute": save}
        return replacing.copy_module(original, functions)

    def _initializer(self, original: Callable) -> Callable:
        """Notes each layer."""

        @functools.wraps(original)
        def __init__(layer: Any, *args: Any, **kwargs: Any) -> None:
            original(layer, *args, **kwargs)
            self._layers[layer] = None
            self._use()

        vars(__init__)["__signature__"] = inspect.signature(original)
        return __init__

    def _use(self) -> None:
        """Notes for the process that `tfmix run` started that Keras is used."""
        if self._unused is not None:
            pathlib.Path(self._unused).unlink(missing_ok=True)
            self._unused = None

    def _before_first(self) -> None:
        """Ends a comparison of two equal policies before its first step."""
        self._use()
        if not self._settings.then:
            return
        asked, is_asked = self._settings.then
        policy, _ = self._policy_and_reason()
        then, why = policies.Policy(asked), "asked for"
        if not is_asked:
            then, why = self._of_script(asked)
        if _name(then) == _name(policy):
            other = "mixed_bfloat16" if self._asked == "float32" else "float32"
            self._refuse(
                f"both runs would be in {_name(then)} ({why}). Name another "
                f"policy, as in `tfmix run --policy {other} --against "
                f"{self._asked} ...`."
            )

    def _after_first(self) -> None:
        """Ends a comparison of equal layers after the first step."""
        self._look_at_layers()
        if self._first is None:
            return
        other, self._first = _read(self._first), None
        mine, dtype = self._policy_and_reason()[0], self._dtype_of_layers()
        wanted = [
            name
            for name, asked in (
                (_name(mine), mine.compute_dtype),
                (other.policy, other.dtype),
            )
            if asked != dtype
        ]
        if dtype and dtype == other.layer_dtype and wanted:
            self._refuse(
                f"most layers compute in {dtype} in both runs. A layer that "
                "comes from a file, or has a dtype of its own, does not follow "
                "the policy. Convert the model in the script: "
                f"`tfmix.apply_policy(model, {wanted[0]!r})`."
            )

    def _refuse(self, error: str) -> None:
        print(f"tfmix run: error: {error}", file=sys.stderr)
        self._write({**report.Report(_script(), ()).to_dict(), "error": error})
        self._is_refused = True
        raise SystemExit(2)

    def _write(self, data: dict[str, Any]) -> None:
        if self._settings.file:
            text = json.dumps(data, indent=2)
            pathlib.Path(self._settings.file).write_text(text, "utf-8")

    def _look_at_layers(self) -> None:
        """Notes the layers that are built, while they exist."""
        for layer in list(self._layers):
            if layers.is_structure(layer) or layers.is_input(layer):
                continue
            if layer.built:
                kind, why = type(layer).__name__, layer_calls.reason(layer)
                self._found[kind, layers.path_of(layer)] = _Layer(
                    kind=kind,
                    dtype=layer.compute_dtype,
                    has_weights=bool(layer.weights),
                    fallen=f"{layer.name} fell back: {why}" if why else "",
                )

    def _dtype_of_layers(self) -> str:
        """Returns the dtype of most layers with weights, or ""."""
        found = self._found.values()
        count = Counter(each.dtype for each in found if each.has_weights)
        return max(count, key=count.__getitem__, default="")

    def _end(self) -> None:
        if os.getpid() != self._process:
            # A forked process did not begin here.
            return
        try:
            if not self._is_refused:
                self._report()
        except Exception as error:
            # The error that ended the script may also break a measurement.
            print(f"tfmix run: no report: {error!r}", file=sys.stderr)

    def _report(self) -> None:
        settings, is_started_here = self._settings, self._is_started_here
        if is_started_here and os.path.exists(settings.unused or ""):
            # `sitecustomize` says why there is nothing to report.
            return
        measured = self._measured()
        if not (is_started_here or measured.steps):
            # The process only loads data, or does not train at all.
            return
        before = list(map(_read, settings.before)) if is_started_here else []
        made = report.Report(
            _script(), (*before[1::2], measured), tuple(before[::2])
        )
        data = made.to_dict()
        if is_started_here:
            self._write(data)
        if settings.is_quiet:
            return
        sys.stdout.flush()
        if settings.is_json:
            print(json.dumps(data, indent=2), file=sys.stderr)
        else:
            rich.console.Console(stderr=True).print(made)

    def _measured(self) -> report.Run:
        self._look_at_layers()
        policy, why = self._policy_and_reason()
        found = list(self._found.values())
        kinds = Counter(each.kind for each in found if each.dtype == "float32")
        here = devices()
        group = self._steps.longest()
        last = self._steps.last
        is_fast = any(vars(each).get(policy.compute_dtype) for each in here)
        is_cpu = all(device.kind == "CPU" for device in here)
        return report.Run(
            policy=_name(policy),
            dtype=policy.compute_dtype,
            why=why,
            device="CPU" if is_cpu else here[0].name,
            fast=is_fast,
            is_cpu=is_cpu,
            failed=self._steps.error,
            steps=self._steps.count(),
            skipped=self._steps.skipped(),
            milliseconds=None if group is None else group.milliseconds(),
            timed=0 if group is None else group.steps_timed(),
            blocks=[] if group is None else group.blocks(),
            first_seconds=None if group is None else group.first,
            peak_bytes=_peak_bytes(),
            loss=None if last is None else last.losses.last_tenth(),
            float32_layers=dict(kinds.most_common()),
            layers=len(found),
            layer_dtype=self._dtype_of_layers(),
            fallen=tuple(filter(None, (each.fallen for each in found))),
        )

    def _policy_and_reason(self) -> tuple[keras.DTypePolicy, str]:
        """Returns the policy of the run, and the reason for it."""
        if self._settings.is_asked:
            place = f", in place of the script's {self._ignored}"
            return self._policy, f"asked for{place if self._ignored else ''}"
        return self._of_script(self._asked)

    def _of_script(self, asked: str) -> tuple[keras.DTypePolicy, str]:
        """Returns the policy that a script has if it may set its own."""
        # Conversions compute in float32 on their way to 16 bit.
        *_, name = sorted(
            ["", *self._by_script], key=lambda name: name not in ("", "float32")
        )
        if name:
            return self._by_script[name], "the script asks for it itself"
        why = f"'auto', {suited_policy(devices())[1]}"
        return policies.Policy(asked), why if asked == "auto" else "asked for"


def _name(policy: keras.DTypePolicy) -> str:
    """Returns the name under which a policy can be set."""
    return str(getattr(policy, "level", None) or policy.name)


def _is_new(policy: keras.DTypePolicy) -> bool:
    """Returns whether a policy to train with differs from Keras's own."""
    # Setting tfmix's policy to float32 makes Keras set its own.
    is_float = keras.backend.is_float_dtype(policy.compute_dtype)
    return is_float and policy.name != context.policy_name()


def _script() -> str:
    return os.path.basename(sys.argv[0]) if sys.argv else ""


def _read(path: str) -> report.Run:
    data = json.loads(pathlib.Path(path).read_text("utf-8"))
    *_, run = data["runs"]
    # JSON has a loss that is not finite as a string.
    loss = None if run["loss"] is None else float(run["loss"])
    return report.Run(**{**run, "loss": loss})


def _peak_bytes() -> int | None:
    """Returns the most bytes used on the first accelerator so far, if known."""
    if keras.backend.backend() == "jax":
        import jax

        stats = jax.local_devices()[0].memory_stats() or {}
        return stats.get("peak_bytes_in_use")
    import tensorflow as tf

    if not tf.config.list_logical_devices("GPU"):
        return None
    peak: int = tf.config.experimental.get_memory_info("GPU:0")["peak"]
    return peak
