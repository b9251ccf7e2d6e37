"""The topology that NCCL (or RCCL) writes to ``NCCL_TOPO_DUMP_FILE`` -> NodeWiring.

``<system>`` holds ``<cpu>``, that ``<pci>`` in each other, those ``<gpu>`` with ``<nvlink
target count tclass>`` and ``<nic>`` with ``<net speed>`` in Mb/s. A target is the bus of another
GPU, or an NVSwitch (class 0x0680..). A dump of an NVLink domain of several machines has several
``host_hash``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NoReturn
from xml.parsers import expat

from profiles.errors import InputError, Problem
from profiles.wiring import NodeWiring

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["read_nccl_xml"]

_SWITCH: Final = "0x0680"
_MBIT: Final = 8000  # Mb/s in a GB/s
_MAX_DEPTH: Final = 50
_ENCODED: Final = 128 / 130  # PCIe 3 and later
_MOST: Final = 1024


@dataclass(slots=True)
class _Element:
    """An element, its line, and those around and in it."""

    tag: str
    line: int
    own: dict[str, str]
    parent: _Element | None
    children: list[_Element] = field(default_factory=list)

    def all(self, tag: str) -> Iterator[_Element]:
        """Every element of a tag below this one, in the order of the file."""
        for child in self.children:
            if child.tag == tag:
                yield child
            yield from child.all(tag)

    def enclosing(self, tag: str) -> list[_Element]:
        """The elements of a tag around this one, the nearest first."""
        above = [] if self.parent is None else self.parent.enclosing(tag)
        return [self.parent, *above] if self.parent and self.parent.tag == tag else above


def read_nccl_xml(text: str, path: str) -> NodeWiring:
    """The node. Raises ``InputError`` with the line that is not as it should be."""
    system = _Reader(path).system(text)
    gpus = list(system.all("gpu"))
    if not 1 <= len(gpus) <= _MOST:
        _refuse(path, system.line, f"{len(gpus)} <gpu> elements", f"1 to {_MOST}")
    ranks = [_number(path, gpu, "rank") for gpu in gpus]
    if len(set(ranks)) == len(gpus):
        gpus = [gpu for _, gpu in sorted(zip(ranks, gpus, strict=True), key=lambda each: each[0])]
    slots = [_slot(path, gpu) for gpu in gpus]
    buses = {slot.own.get("busid", "").lower(): number for number, slot in enumerate(slots)}
    nvlinks = [[0] * len(gpus) for _ in gpus]
    switch_links = [0] * len(gpus)
    for number, gpu in enumerate(gpus):
        for link in gpu.all("nvlink"):
            count = _number(path, link, "count")
            target = buses.get(link.own.get("target", "").lower())
            if target is not None:
                nvlinks[number][target] += count
            elif link.own.get("tclass", "").startswith(_SWITCH):
                switch_links[number] += count
    ids = {slot.own.get("device", "").lower() for slot in slots}
    if len(ids) > 1:
        message = f"devices of the PCI numbers {', '.join(sorted(ids))} in one node"
        _refuse(path, system.line, message, "one kind of device")
    hosts = {cpu.own.get("host_hash") for gpu in gpus for cpu in gpu.enclosing("cpu")}
    speeds = [_number(path, net, "speed") / _MBIT for net in _nets(system)]
    rates = [rate for slot in slots if (rate := _pcie_rate(path, slot)) is not None]
    return NodeWiring(
        where=f"{path}:{system.line}",
        nvlinks=tuple(map(tuple, nvlinks)),
        switch_links=tuple(switch_links),
        num_hosts=max(1, len(hosts)),
        pci_id=next(iter(ids)) or None,
        pcie_gb_per_s=min(rates, default=None),
        num_nics=len(speeds),
        nic_gb_per_s=round(sum(speeds) / len(speeds), 4) if speeds else None,
        notes=() if len(set(speeds)) <= 1 else ("NICs of several speeds count as equal ones",),
    )


def _nets(system: _Element) -> list[_Element]:
    """Each network port once, though a dump may list it again for other uses."""
    return list({(id(net.parent), net.own.get("name")): net for net in system.all("net")}.values())


def _slot(path: str, gpu: _Element) -> _Element:
    if gpu.parent is None or gpu.parent.tag != "pci":
        _refuse(path, gpu.line, "a <gpu> outside a <pci>", "a <pci> with a busid around it")
    return gpu.parent


def _pcie_rate(path: str, slot: _Element) -> float | None:
    """GB/s of the narrowest PCIe link from a GPU to its host, None where none is stated."""
    rates = []
    for pci in (slot, *slot.enclosing("pci")):
        speed = pci.own.get("link_speed", "").split(" ")[0]
        width = _number(path, pci, "link_width") if pci.own.get("link_width") else 0
        try:
            rates.append(float(speed) * width / 8 * _ENCODED)
        except ValueError:
            continue
    return min((rate for rate in rates if rate), default=None)


def _number(path: str, element: _Element, key: str) -> int:
    text = element.own.get(key, "")
    if not text.isascii() or not text.isdigit() or len(text) > len("1000000000"):
        message = (
            f"{key} of <{element.tag}> is {text!r}" if text else f"<{element.tag}> lacks {key}"
        )
        _refuse(path, element.line, message, "a whole number")
    return int(text)


def _refuse(path: str, line: int, message: str, expected: str) -> NoReturn:
    raise InputError(Problem(where=f"{path}:{line}", message=message, expected=expected))


class _Reader:
    """Elements with their lines. Declarations of types and entities have no place here."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._root: _Element | None = None
        self._open: list[_Element] = []
        self._parser = expat.ParserCreate()
        self._parser.StartElementHandler = self._start
        self._parser.EndElementHandler = self._end
        self._parser.StartDoctypeDeclHandler = self._declared

    def system(self, text: str) -> _Element:
        """The root element."""
        try:
            self._parser.Parse(text.encode(), True)
        except expat.ExpatError as error:
            where = f"{self._path}:{error.lineno}:{error.offset + 1}"
            message = f"not valid XML: {expat.ErrorString(error.code)}"
            raise InputError(Problem(where=where, message=message)) from None
        assert self._root is not None
        if self._root.tag != "system":
            message = f"the file holds <{self._root.tag}>"
            _refuse(self._path, self._root.line, message, "<system>, as NCCL_TOPO_DUMP_FILE has it")
        return self._root

    def _start(self, tag: str, own: dict[str, str]) -> None:
        parent = self._open[-1] if self._open else None
        element = _Element(tag, self._parser.CurrentLineNumber, own, parent)
        if len(self._open) > _MAX_DEPTH:
            _refuse(self._path, element.line, "nested too deep", f"at most {_MAX_DEPTH} levels")
        if parent is None:
            self._root = element
        else:
            parent.children.append(element)
        self._open.append(element)

    def _end(self, _tag: str) -> None:
        self._open.pop()

    def _declared(self, *_: object) -> None:
        _refuse(self._path, self._parser.CurrentLineNumber, "a DOCTYPE", "elements alone")
