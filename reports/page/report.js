"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const PRINTED_WIDTH = 700;
  const NARROW = 720;

  // Axes, legend and text in the colours of the page, whichever theme it has.
  function look(layout, narrow) {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const axis = { gridcolor: colour("--line"), zerolinecolor: colour("--line"), linecolor: colour("--line"), automargin: true };
    return {
      ...layout,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, 'Liberation Sans', sans-serif", size: narrow ? 11 : 13, color: colour("--text") },
      hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--line"), font: { color: colour("--text") } },
      showlegend: false,  // the page has one that breaks its lines
      dragmode: layout.dragmode ?? false,
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--soft"), activecolor: colour("--text") },
      margin: { l: 55, r: 12, t: layout.dragmode ? 34 : 12, b: 45 },
      xaxis: { ...axis, ...layout.xaxis },
      yaxis: { ...axis, ...layout.yaxis },
    };
  }

  const drawn = [...document.querySelectorAll("[data-figure]")];
  const config = (layout) => ({
    responsive: true,
    displaylogo: false,
    displayModeBar: Boolean(layout.dragmode),
    modeBarButtons: [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "autoScale2d", "toImage"]],
  });

  function draw(width) {
    return Promise.all(drawn.map((place) => {
      const own = figures[place.dataset.figure];
      const layout = look(own.layout, (width ?? place.clientWidth) < NARROW);
      place.style.height = `${layout.height}px`;  // else it shrinks when the window changes
      delete layout.height;
      if (width) layout.width = width;
      return Plotly.react(place, own.data, layout, config(own.layout)).then(() => { place.dataset.drawn = "yes"; });
    }));
  }

  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());
  matchMedia("(max-width: 45rem)").addEventListener("change", () => draw());
  addEventListener("beforeprint", () => draw(PRINTED_WIDTH));
  addEventListener("afterprint", () => draw());
})();
