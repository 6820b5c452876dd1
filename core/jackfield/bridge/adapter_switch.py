"""The adapter of a bound model, switched on and off."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jackfield.bridge.adapter import Adapter, AdapterUse
from jackfield.bridge.adapter_biases import Biases
from jackfield.bridge.adapters import adapted_layers
from jackfield.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class AdapterSwitch:
    """The adapter of a bound model: looks at what its modules do, switches them on and off."""

    def __init__(self, model: PreTrainedModel, adapter: Adapter) -> None:
        self.adapter = adapter
        self._layers = [] if adapter.merged else adapted_layers(model)
        self._biases = Biases(model, brought=adapter.biases and not adapter.merged)
        self._before = [layer.disable_adapters for layer in self._layers]
        # PEFT has switching decide what is trained; a live model keeps what it had.
        self._trained = [(p, p.requires_grad) for m in self._layers for p in m.parameters()]

    def use(self) -> AdapterUse:
        """What the modules will do in the next step."""
        if self.adapter.merged:
            return AdapterUse(self.adapter, "merged")
        off = {layer.disable_adapters for layer in self._layers}
        return AdapterUse(self.adapter, "off" if off == {True} else "on")

    def switch(self, *, on: bool) -> None:
        """Have every module use its adapter, or none. Raises UsageError for one that is merged.

        transformers' `enable_adapters` leaves out the modules that an adapter saved whole.
        """
        if self.adapter.merged:
            raise UsageError(
                "the adapter is merged into the weights and cannot be switched; load without "
                "merge_adapter"
            )
        self._biases.switch(on=on)
        for layer in self._layers:
            layer.enable_adapters(on)
        self._keep_gradients()

    def restore(self) -> None:
        """Put back what was there when the model was bound."""
        self._biases.switch(on=True)
        for layer, off in zip(self._layers, self._before, strict=True):
            layer.enable_adapters(not off)
        self._keep_gradients()

    def _keep_gradients(self) -> None:
        for parameter, trained in self._trained:
            parameter.requires_grad_(trained)
