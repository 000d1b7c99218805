"""The look of the report: colours that differ also to colour-blind eyes, in light and in dark."""

from __future__ import annotations

# c0..c5 after Okabe and Ito 2008, each darkened or lightened until it is legible as a line on its background
COLOURS = """
:root { color-scheme: light dark; --page: #faf9f6; --card: #ffffff; --ink: #1d2125; --soft: #5b636c; --rule: #e3e1db;
  --quiet: #f1efea; --c0: #0068a8; --c1: #c14e00; --c2: #00805c; --c3: #a8437f; --c4: #b98200; --c5: #4c9fd6;
  --rest: #a9adb3; --plus: 0, 104, 168; --minus: 214, 94, 0; }
@media (prefers-color-scheme: dark) { :root { --page: #131619; --card: #1b1f23; --ink: #e7e9eb; --soft: #a0a8b0;
  --rule: #30363c; --quiet: #22272c; --c0: #58aef0; --c1: #ff9350; --c2: #3fc79a; --c3: #e68fc2; --c4: #e8b93e;
  --c5: #2f78ad; --rest: #646b73; --plus: 70, 160, 235; --minus: 240, 125, 50; } }
"""

CHART = """
svg { font: 12px ui-sans-serif, system-ui, -apple-system, "Segoe UI", sans-serif; font-variant-numeric: tabular-nums; }
svg text { fill: var(--soft); } svg text.head { fill: var(--ink); font-size: 15px; font-weight: 600; }
svg text.name { fill: var(--ink); }
.grid { stroke: var(--rule); stroke-width: 1; } .axis { stroke: var(--soft); stroke-width: 1; }
.line { fill: none; stroke-width: 2.2; stroke-linejoin: round; stroke-linecap: round; }
.faint { stroke-width: 1.2; opacity: .4; }
.band { opacity: .16; stroke: none; } .dot { stroke: var(--card); stroke-width: 1.5; } .hit { fill: transparent; }
.hit:hover { fill: var(--soft); fill-opacity: .35; }
""" + "\n".join(f".s{i} {{ stroke: var(--c{i}); }} .f{i} {{ fill: var(--c{i}); }}" for i in range(6))

PAGE = (
    """
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); line-height: 1.55;
  font: 16px/1.55 ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: clamp(20px, 5vw, 56px) clamp(14px, 4vw, 40px); }
h1 { font-size: clamp(1.6rem, 4vw, 2.3rem); line-height: 1.15; letter-spacing: -.02em; margin: .1em 0 .5em;
  overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; letter-spacing: -.01em; margin: 2.8em 0 .7em; }
.eyebrow { color: var(--soft); font-size: .85rem; margin: 0; }
.verdict { font-size: clamp(1.1rem, 2.4vw, 1.35rem); line-height: 1.4; margin: 0; max-width: 46em; }
.verdict small { display: block; color: var(--soft); font-size: .95rem; margin-top: .35em; }
.facts { display: flex; flex-wrap: wrap; gap: 12px 34px; margin: 1.6em 0 0; }
.facts dt { color: var(--soft); font-size: .8rem; } .facts dd { margin: 0; font-weight: 600; overflow-wrap: anywhere; }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: 12px; padding: 18px 20px; }
.scroll { overflow-x: auto; }
p.lead { color: var(--soft); margin: -.3em 0 1em; max-width: 52em; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 500; color: var(--soft); font-size: .85rem; }
th, td { padding: 9px 22px 9px 0; border-bottom: 1px solid var(--rule); vertical-align: middle; }
tr:last-child > * { border-bottom: 0; } tbody th { color: var(--ink); font-size: 1rem; }
td b { font-size: 1.15rem; } td small { color: var(--soft); display: block; white-space: nowrap; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 380px), 1fr)); gap: 16px; }
figure { margin: 0; } figcaption { font-weight: 600; margin-bottom: 6px; }
figcaption small { font-weight: 400; color: var(--soft); margin-left: .4em; }
figure svg { display: block; width: 100%; height: auto; overflow: visible; }
.bar { display: flex; gap: 2px; height: 34px; border-radius: 7px; overflow: hidden; margin-bottom: 10px; }
.bar span { min-width: 1px; } .key { display: inline-block; width: .8em; height: .8em; border-radius: 3px; }
.key { margin-right: .6em; } td.n, th.n { text-align: right; } .phases { max-width: 34em; }
.phases th, .phases td { padding: 5px 22px 5px 0; font-size: .92rem; } .phases tbody th { font-size: .92rem; }
tbody th { min-width: 10.5em; }
"""
    + "\n".join(f".b{i} {{ background: var(--c{i}); }}" for i in range(6))
    + """
.rest { background: var(--rest); }
.legend { display: flex; flex-wrap: wrap; gap: 6px 22px; align-items: center; font-size: .88rem; color: var(--soft);
  margin: 0 0 14px; } .legend > span { display: inline-flex; gap: 8px; align-items: center; }
.legend i { font-style: normal; }
.ramp { width: 150px; height: 14px; border-radius: 4px; background: linear-gradient(90deg, rgba(var(--minus), .6),
  rgba(var(--minus), 0) 50%, rgba(var(--plus), 0) 50%, rgba(var(--plus), .6)); border: 1px solid var(--rule); }
details { margin-bottom: 12px; } summary { cursor: pointer; font-weight: 600; overflow-wrap: anywhere; }
summary span { font-weight: 400; color: var(--soft); margin-left: .8em; } details[open] summary { margin-bottom: 12px; }
.says { color: var(--soft); font-size: .78rem; margin: 10px 0 3px; }
.text { font: .9rem/1.75 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; margin: 0; border-radius: 8px; padding: 8px 12px; }
.prompt { background: var(--quiet); color: var(--soft); max-height: 15em; overflow: auto; }
.sampled { border: 1px solid var(--rule); }
.t { border-radius: 3px; padding: 2px 0; margin-right: 1px; } .t:hover { outline: 2px solid var(--soft); }
.n1, .n2, .n3, .n4, .n5 { box-shadow: inset 0 -2px rgba(var(--minus), .9); }
.off { color: var(--soft); border-bottom: 1px dashed var(--soft); }
"""
    + "\n".join(
        f".{sign}{i} {{ background: rgba(var(--{name}), {0.12 * i:.2f}); }}"
        for sign, name in (("p", "plus"), ("n", "minus"))
        for i in range(1, 6)
    )
    + """
pre { margin: 0; overflow-x: auto; font: .86rem/1.6 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.two { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); gap: 16px;
  align-items: start; }
h3 { font-size: .95rem; margin: 0 0 .6em; } footer { color: var(--soft); font-size: .85rem; margin-top: 3em; }
:focus-visible { outline: 3px solid var(--c0); outline-offset: 2px; }
@media (max-width: 640px) { figure svg text { font-size: 14px; } .compare thead { display: none; }
  .compare tr { display: grid; grid-template-columns: repeat(3, auto); gap: 0 14px; padding: 12px 0; }
  .compare tr + tr { border-top: 1px solid var(--rule); } .compare :is(th, td) { border: 0; padding: 4px 0; }
  .compare th, .compare td:last-child { grid-column: 1 / -1; } .compare td small { white-space: normal; }
  .compare td[data-column]::before { content: attr(data-column); display: block; color: var(--soft);
    font-size: .8rem; } }
@media print { details > * { display: block; } .card { break-inside: avoid; } }
"""
)
