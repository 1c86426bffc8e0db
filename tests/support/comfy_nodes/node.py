"""Nodes of ComfyUI out of functions."""

import inspect
from collections.abc import Callable
from typing import Any

NODE_CLASS_MAPPINGS: dict[str, Any] = {}
KINDS: dict[type, tuple[str, dict[str, Any]]] = {
    bool: ("BOOLEAN", {}), int: ("INT", {"min": -(2**53), "max": 2**53}), float: ("FLOAT", {"min": -1e9, "max": 1e9}),
    str: ("STRING", {}),
}  # fmt: skip
"""Type of an input in ComfyUI, and options, by the type of its default."""


def kinds(module: dict[str, Any], argument: type) -> dict[str, Callable[..., Any]]:
    """The functions of a module whose names begin with an underscore and whose first argument has a type, by these names."""
    functions = {name: value for name, value in module.items() if name.startswith("_") and inspect.isfunction(value)}
    return {name[1:]: each for name, each in functions.items() if next(iter(each.__annotations__.values())) is argument}


def node(*returns: str, again: bool = False, **types: str | list[str]) -> Callable[[Callable[..., Any]], Any]:
    """Make a node of a function, under its name. Arguments with a default are optional inputs.

    Args:
        returns: types of what the function returns, a tuple where there are several; none for an output node.
        again: run it in every prompt.
        types: of inputs, or the values to choose from, where the default does not say it.
    """

    def input_of(argument: inspect.Parameter) -> tuple[Any, ...]:
        options = {} if argument.default in (argument.empty, None) else {"default": argument.default}
        if argument.name in types:
            return types[argument.name], options
        kind, limits = KINDS[type(argument.default)]
        return kind, {**options, **limits}

    def make(function: Callable[..., Any]) -> Any:
        arguments = inspect.signature(function).parameters.values()
        inputs: dict[str, dict[str, Any]] = {"required": {}, "optional": {}}
        for argument in arguments:
            inputs["required" if argument.default is argument.empty else "optional"][argument.name] = input_of(argument)

        def run(_: Any, **given: Any) -> Any:
            made = function(**given)
            return (made,) if len(returns) == 1 else made

        attributes: dict[str, Any] = {
            "INPUT_TYPES": staticmethod(lambda: inputs), "RETURN_TYPES": returns, "OUTPUT_NODE": not returns, "FUNCTION": "run",
            "CATEGORY": "test", "run": run, "function": staticmethod(function), "__doc__": function.__doc__,
        }  # fmt: skip
        if again:
            attributes["IS_CHANGED"] = staticmethod(lambda **_: float("nan"))
        return NODE_CLASS_MAPPINGS.setdefault(function.__name__, type(function.__name__, (), attributes))

    return make
