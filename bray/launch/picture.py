"""A Graph as a picture (SVG): data flows from left to right, and the trained weights come back along the top."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

from bray.launch.graph import Component, Edge, Graph
from bray.launch.modules import edges_in_code

_COLUMNS = (("model", "actor"), ("agent", "source"), ("buffer",), ("trainer",))
_COLORS = {  # fill, line
    "model": ("#e8f0fe", "#3b6fd4"),
    "actor": ("#fdeee0", "#d07a22"),
    "agent": ("#fff7e0", "#c99a12"),
    "source": ("#eef3ee", "#6b8f71"),
    "buffer": ("#e6f5ec", "#2f8f5b"),
    "trainer": ("#f3e8fb", "#8247b5"),
    "render": ("#f4f4f4", "#888888"),
    "config": ("#f4f4f4", "#888888"),
}
_MARGIN, _GAP_X, _GAP_Y, _BOX_Y, _LANE, _GAMES = 28, 112, 22, 52, 14, 88
_GREY = "#5f6368"


class _Box(NamedTuple):
    c: Component
    x: float
    y: float
    width: float

    @property
    def middle(self) -> float:
        return self.y + _BOX_Y / 2

    @property
    def right(self) -> float:
        return self.x + self.width


def svg(graph: Graph) -> str:
    """The picture, as SVG text. Models and buffers that agents name only in their code are joined by dashed lines."""
    guessed = edges_in_code(graph)
    edges = [e for e in (*graph.edges, *guessed) if e.what != "algorithm"]
    columns = [[c for kind in kinds for c in graph.of_kind(kind).values()] for kinds in _COLUMNS]
    columns = _untangled([c for c in columns if c], edges)
    aside = [*graph.of_kind("render").values(), *graph.of_kind("config").values()]
    back = [e for e in edges if e.what == "publishes"]
    head = 64 + _LANE * len(back)
    games = _GAMES if graph.of_kind("actor") else 0
    left = _MARGIN + _LANE * len(back) + games
    height = max((len(c) for c in columns), default=0) * (_BOX_Y + _GAP_Y) - _GAP_Y
    boxes: dict[str, _Box] = {}
    x: float = left
    for column in columns:
        width = max(_width(c) for c in column)
        y = head + (height - len(column) * (_BOX_Y + _GAP_Y) + _GAP_Y) / 2
        for c in column:
            boxes[c.name] = _Box(c, x, y, width)
            y += _BOX_Y + _GAP_Y
        x += width + _GAP_X
    right = x - _GAP_X + _MARGIN + _LANE * len(back)
    y, x = head + max(height, 0) + 40, float(_MARGIN)
    if aside:
        for c in aside:
            width = _width(c)
            if x + width > max(right, 700) - _MARGIN and x > _MARGIN:
                x, y = float(_MARGIN), y + _BOX_Y + 12
            boxes[c.name] = _Box(c, x, y, width)
            x += width + 14
        y += _BOX_Y + 26
    feet = []
    if guessed:
        feet.append("dashed: named in the agent's code, not in the file")
    if graph.absent:
        feet.append("not in this mode: " + ", ".join(graph.absent))
    width, bottom = max(right, 700), y + 18 * len(feet) + 8

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{bottom:.0f}" viewBox="0 0 {width:.0f} '
        f'{bottom:.0f}" font-family="Helvetica, Arial, sans-serif">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7.5" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 z" fill="{_GREY}"/></marker></defs>',
        f'<rect width="{width:.0f}" height="{bottom:.0f}" fill="white"/>',
        _text(_MARGIN, 32, f"{graph.settings.project}/{graph.settings.trial}", 17, "bold"),
        _text(_MARGIN, 50, f"mode: {graph.settings.mode}", 12, color=_GREY),
    ]
    labels: list[str] = []
    for e in edges:
        if e.what != "publishes":
            _forward(boxes, e, edges, e in guessed, out, labels)
    for lane, e in enumerate(back):
        _backward(
            boxes[e.tail], boxes[e.head], lane, left - games, right - _MARGIN - _LANE * len(back), head, out, labels
        )
    for name in graph.of_kind("actor"):
        box = boxes[name]
        port = f" :{box.c.settings.port}" if box.c.settings.port else ""
        out.append(_line(f"M{box.x - _GAMES + 8:.0f} {box.middle:.0f} H{box.x - 1:.0f}"))
        labels.append(_text(box.x - _GAMES + 8, box.middle - 6, f"games{port}", 11, color=_GREY, halo=True))
    out += [_draw(box) for box in boxes.values()]
    out += labels
    out += [_text(_MARGIN, y + 18 * i, foot, 11, color=_GREY) for i, foot in enumerate(feet)]
    return "\n".join([*out, "</svg>"]) + "\n"


def _untangled(columns: list[list[Component]], edges: Sequence[Edge]) -> list[list[Component]]:
    """Each column in the order of what it is joined to on its left, kinds kept together."""
    place: dict[str, float] = {}
    out = []
    for column in columns:
        kinds = list(dict.fromkeys(c.kind for c in column))

        def order(c: Component, kinds: list[str] = kinds) -> tuple[int, float]:
            near = [place[o] for e in edges for o in _other(e, c.name) if o in place]
            return kinds.index(c.kind), sum(near) / len(near) if near else 1e9

        column = sorted(column, key=order)
        place.update({c.name: i / max(1, len(column)) for i, c in enumerate(column)})
        out.append(column)
    return out


def _other(e: Edge, name: str) -> list[str]:
    return [e.head] if e.tail == name else [e.tail] if e.head == name else []


def about(c: Component) -> str:
    """A component in a few words."""
    s = c.settings
    if c.kind == "model":
        where = (
            "in its callers" if s.local_mode or not s.num_workers else f"{s.num_workers} × {s.cpus_per_worker:g} CPU"
        )
        if s.num_workers and not s.local_mode and s.gpus_per_worker:
            where += f", {s.gpus_per_worker:g} GPU"
        return f"{where} · {'ONNX ' + s.use_onnx if s.use_onnx else 'PyTorch'}"
    if c.kind == "source":
        return f"{s.func} · {s.epoch} epochs" if s.epoch > 1 else s.func
    if c.kind == "buffer":
        batches = f"{s.size} × {s.batch_size}" if s.batch_size else f"{s.size} samples"
        return f"queue · {batches} · {s.num_workers} {_plural(s.num_workers, 'process')}"
    if c.kind == "agent":
        return s.class_ if s.algo is None else f"{s.class_} · {s.algo}"
    if c.kind == "actor":
        return f"{s.num_workers} × {s.actors_per_worker} sessions per node"
    if c.kind == "trainer":
        ranks, on = s.num_workers or 1, "GPU" if s.use_gpu else "CPU"
        return f"{s.class_ or s.algo} · {ranks} {_plural(ranks, 'rank')} on {on}"
    return s.func if c.kind == "render" else ", ".join(c.extra)


def _plural(n: int, word: str) -> str:
    return word if n == 1 else word + ("es" if word.endswith("s") else "s")


def _width(c: Component) -> float:
    return min(260.0, max(120.0, 8.2 * len(c.name) + 7.0 * len(c.kind) + 34, 6.1 * len(about(c)) + 24))


def _draw(box: _Box) -> str:
    fill, line = _COLORS[box.c.kind]
    said = about(box.c)
    most = int((box.width - 22) / 6.1)
    said = said if len(said) <= most else said[: most - 1] + "…"
    return "".join(
        [
            f'<g><rect x="{box.x:.0f}" y="{box.y:.0f}" width="{box.width:.0f}" height="{_BOX_Y}" rx="7" fill="{fill}" '
            f'stroke="{line}" stroke-width="1.4"/>',
            _text(box.x + 11, box.y + 21, box.c.name, 14, "bold"),
            _text(box.right - 11, box.y + 20, box.c.kind, 11, color=line, anchor="end"),
            _text(box.x + 11, box.y + 40, said, 11, color=_GREY),
            "</g>",
        ]
    )


def _forward(
    boxes: dict[str, _Box], e: Edge, edges: Sequence[Edge], dashed: bool, out: list[str], labels: list[str]
) -> None:
    """A curve from a box to one on its right. Edges of one box begin and end at places of their own, in the order of
    the other ends."""
    forward = [o for o in edges if o.what != "publishes"]
    tail, head = boxes[e.tail], boxes[e.head]
    y0 = _port(tail, sorted((boxes[o.head].y, o) for o in forward if o.tail == e.tail), e)
    y1 = _port(head, sorted((boxes[o.tail].y, o) for o in forward if o.head == e.head), e)
    x0, x1 = tail.right, head.x - 1
    bend = max(30.0, (x1 - x0) / 2)
    out.append(
        _line(f"M{x0:.0f} {y0:.0f} C{x0 + bend:.0f} {y0:.0f} {x1 - bend:.0f} {y1:.0f} {x1:.0f} {y1:.0f}", dashed)
    )
    labels.append(_text((x0 + x1) / 2, (y0 + y1) / 2 - 3, e.what, 10.5, color=_GREY, anchor="middle", halo=True))


def _port(box: _Box, edges: Sequence[tuple[float, Edge]], e: Edge) -> float:
    i = [o for _, o in edges].index(e)
    return box.y + _BOX_Y * (i + 1) / (len(edges) + 1)


def _backward(
    tail: _Box, head: _Box, lane: int, left: float, right: float, top: float, out: list[str], labels: list[str]
) -> None:
    """From a trainer's right side up, along the top to the left, and down into its model's left side."""
    above, outer, inner, r = top - _LANE * (lane + 1), right + _LANE * (lane + 1), left - _LANE * (lane + 1) + 4, 6
    out.append(
        _line(
            f"M{tail.right:.0f} {tail.middle:.0f} H{outer - r:.0f} Q{outer:.0f} {tail.middle:.0f} {outer:.0f} "
            f"{tail.middle - r:.0f} V{above + r:.0f} Q{outer:.0f} {above:.0f} {outer - r:.0f} {above:.0f} "
            f"H{inner + r:.0f} Q{inner:.0f} {above:.0f} {inner:.0f} {above + r:.0f} V{head.middle - r:.0f} "
            f"Q{inner:.0f} {head.middle:.0f} {inner + r:.0f} {head.middle:.0f} H{head.x - 1:.0f}"
        )
    )
    labels.append(
        _text((outer + inner) / 2, above - 3, f"{tail.c.name} publishes", 10.5, color=_GREY, anchor="middle", halo=True)
    )


def _line(path: str, dashed: bool = False) -> str:
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<path d="{path}" fill="none" stroke="{_GREY}" stroke-width="1.3"{dash} marker-end="url(#tip)"/>'


def _text(
    x: float,
    y: float,
    text: str,
    size: float,
    weight: str = "",
    color: str = "#202124",
    anchor: str = "",
    halo: bool = False,
) -> str:
    more = f' font-weight="{weight}"' if weight else ""
    more += f' text-anchor="{anchor}"' if anchor else ""
    more += ' stroke="white" stroke-width="3" paint-order="stroke"' if halo else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" fill="{color}"{more}>{escape(text)}</text>'
