"""Sets the policy in `TFMIX_POLICY`, and reports when Python ends."""

import atexit
import dataclasses
import functools
import inspect
import itertools
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
from tfmix._keras import global_state, layers, memory, replacements
from tfmix._run import report, steps
from tfmix.autocast import fallback, global_policy, record
from tfmix.diagnostics import skip_report
from tfmix.policy import names
from tfmix.policy import policy as policies
from tfmix.policy.devices import devices, suited_policy

POLICY, SETTINGS = "TFMIX_POLICY", "TFMIX_RUN"


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings with which `tfmix run` started the process."""

    json: str | None = None  # the file for the report
    before: str | None = None  # the file of the run to compare with
    is_quiet: bool = False  # true if a second run will print
    is_strict: bool = False  # true if the script's own policies are ignored
    process: int | None = None  # the process that `tfmix run` started


def begin() -> None:
    """Trains this process with the policy in its environment."""
    settings = Settings(**json.loads(os.environ.get(SETTINGS, "{}")))
    name = os.environ[POLICY]
    try:
        _Session(name, settings).begin()
    except ValueError as error:
        raise ValueError(f"{error} It is what {POLICY} says.") from None


class _Watch(skip_report.SkipWatch):
    """Keeps the likeliest cause of skipped steps for the report."""

    def __init__(self, session: "_Session") -> None:
        super().__init__()
        self._session, self._is_known = session, False

    def on_skips(
        self, epoch: int, applied: int, skipped: int, loss: float
    ) -> None:
        super().on_skips(epoch, applied, skipped, loss)
        if not self._is_known:
            self._is_known = True
            self._session.cause = self.cause(skipped, loss).text


class _Session:
    def __init__(self, name: str, settings: Settings) -> None:
        self._settings, self._process = settings, os.getpid()
        names.check(name)
        self._asked = name
        self._policy = policies.Policy(name)
        # The policies that the script sets itself, the latest at the end.
        self._by_script: dict[str, keras.DTypePolicy] = {}
        self._replacements = replacements.Replacements()
        # The layers created in 16 bit, numbered, and what is known of each.
        self._layers: weakref.WeakKeyDictionary[Any, int] = (
            weakref.WeakKeyDictionary()
        )
        self._numbers = itertools.count()
        self._found: dict[int, tuple[str, str, str]] = {}
        self._steps = steps.Steps(self._look_at_layers)
        self.cause = ""

    def begin(self) -> None:
        """Sets the policy, and watches the script."""
        global_policy.set_global_policy(self._policy)
        global_policy.decide_by(self._decide)
        self._replacements.set(
            {
                global_state.POLICY_STORE: self._store,
                (keras.Layer, "__init__"): self._initializer,
            }
        )
        self._steps.watch()
        fit = functools.partial(skip_report.fit_with, lambda: _Watch(self))
        record.report_skips(fit)
        atexit.register(self._end)

    def _decide(self, policy: keras.DTypePolicy) -> keras.DTypePolicy:
        """Returns the policy that replaces one that a script sets."""
        name = _name(policy)
        self._by_script.pop(name, None)
        self._by_script[name] = policy
        if self._settings.is_strict and policy.name != "float32":
            return self._policy
        return policy

    def _store(self, original: types.ModuleType) -> types.ModuleType:
        """Makes the script set policies in tfmix rather than in Keras."""

        def save(name: str, value: Any) -> None:
            is_off = not global_policy.hooks_keras()
            if name == global_state.POLICY_KEY and is_off and _is_new(value):
                global_policy.set_global_policy(value)
                return
            # The report names the policies that the script sets.
            with _messages.silenced():
                original.set_global_attribute(name, value)

        functions = {"set_global_attribute": save}
        return replacements.copy_module(original, functions)

    def _initializer(self, original: Callable) -> Callable:
        """Notes each layer that is created in 16 bit."""

        @functools.wraps(original)
        def __init__(layer: Any, *args: Any, **kwargs: Any) -> None:
            original(layer, *args, **kwargs)
            if policies.is_sixteen_bit(global_policy.global_policy()):
                self._layers[layer] = next(self._numbers)

        vars(__init__)["__signature__"] = inspect.signature(original)
        return __init__

    def _look_at_layers(self) -> None:
        """Notes the dtype of each layer, while it exists."""
        for layer, number in list(self._layers.items()):
            computes = not layers.is_structure(layer) and not layers.is_input(
                layer
            )
            if layer.built and computes:
                why = fallback.reason(layer)
                self._found[number] = (
                    type(layer).__name__,
                    layer.compute_dtype,
                    f"{layer.name} fell back: {why}" if why else "",
                )

    def _end(self) -> None:
        if os.getpid() != self._process:
            # A forked process did not begin here.
            return
        try:
            self._report()
        except Exception as error:
            # The error that ended the script may also break a measurement.
            print(f"tfmix run: no report: {error!r}", file=sys.stderr)

    def _report(self) -> None:
        measured = self._measured()
        settings = self._settings
        is_started_here = settings.process == os.getpid()
        if not (is_started_here or measured.steps):
            # The process only loads data, or does not train at all.
            return
        name = os.path.basename(sys.argv[0]) if sys.argv else ""
        made = report.Report(name, measured)
        if settings.before and is_started_here:
            made = report.Report(name, _read(settings.before), measured)
        if settings.json and is_started_here:
            text = json.dumps(made.to_dict(), indent=2)
            pathlib.Path(settings.json).write_text(text, "utf-8")
        if not settings.is_quiet:
            sys.stdout.flush()
            rich.console.Console(stderr=True).print(made)

    def _measured(self) -> report.Run:
        self._look_at_layers()
        policy, why = self._policy_and_reason()
        found = [self._found[number] for number in sorted(self._found)]
        kinds = Counter(kind for kind, dtype, _ in found if dtype == "float32")
        here = devices()
        group = self._steps.longest()
        last = self._steps.last
        return report.Run(
            policy=_name(policy),
            dtype=policy.compute_dtype,
            why=why,
            device=_device(here),
            fast=any(vars(device).get(policy.compute_dtype) for device in here),
            failed=self._steps.error,
            ended=_ended(),
            steps=self._steps.count(),
            skipped=self._steps.skipped(),
            cause=self._cause(),
            milliseconds=None if group is None else group.milliseconds(),
            first_seconds=None if group is None else group.first,
            peak_bytes=memory.peak(),
            loss=None if last is None else last.loss(),
            float32_layers=dict(kinds.most_common()),
            layers=len(found),
            float32_ops=tuple(getattr(policy, "float32_ops", ())),
            fallen=tuple(filter(None, (why for *_, why in found))),
        )

    def _policy_and_reason(self) -> tuple[keras.DTypePolicy, str]:
        """Returns the policy of the run, and the reason for it."""
        # Conversions compute in float32 on their way to 16 bit.
        *_, name = sorted(
            ["", *self._by_script], key=lambda name: name not in ("", "float32")
        )
        if name and self._settings.is_strict:
            return self._policy, f"asked for, in place of the script's {name}"
        if name:
            return self._by_script[name], "the script asks for it itself"
        if self._asked == "auto":
            return self._policy, f"'auto', {suited_policy(devices())[1]}"
        return self._policy, "asked for"

    def _cause(self) -> str:
        if not self._steps.skipped():
            return ""
        # `fit` knows more, because it has the data.
        return self.cause or self._steps.cause() or "not known"


def _name(policy: keras.DTypePolicy) -> str:
    """Returns the name under which a policy can be set."""
    return str(getattr(policy, "level", None) or policy.name)


def _is_new(policy: keras.DTypePolicy | None) -> bool:
    """Returns whether a policy to train with differs from Keras's own."""
    if policy is None:
        return False
    # Setting tfmix's policy to float32 makes Keras set its own.
    is_float = keras.backend.is_float_dtype(policy.compute_dtype)
    return is_float and policy.name != global_state.policy_name()


def _device(here: Any) -> str:
    first = here[0]
    alike = sum(device.name == first.name for device in here)
    name = first.kind if first.kind == "CPU" else first.name
    return name if alike == 1 else f"{alike} x {name}"


def _ended() -> str:
    """Returns the error with which Python ends, or ""."""
    error = getattr(sys, "last_value", None)
    if error is None:
        return ""
    text = str(error).strip().partition("\n")[0][:100]
    return type(error).__name__ + (f": {text}" if text else "")


def _read(path: str) -> report.Run:
    file = pathlib.Path(path)
    data = json.loads(file.read_text("utf-8"))
    file.unlink()
    run = data["run"]
    # JSON has a loss that is not finite as a string.
    loss = None if run["loss"] is None else float(run["loss"])
    return report.Run(**{**run, "loss": loss})
