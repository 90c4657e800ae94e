"use strict";
// Draws the charts of #data, and works the controls: the x axis of the curves, the colours of tokens, light and dark.
(() => {
  const charts = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const AXES = { steps: "step", tokens: "trained tokens", hours: "hours since the start" };
  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  const dressed = (layout) => {
    const axis = { gridcolor: colour("--line"), zerolinecolor: colour("--line"), automargin: true };
    return {
      ...layout,
      xaxis: { ...axis, ...layout.xaxis },
      yaxis: { ...axis, ...layout.yaxis },
      paper_bgcolor: "transparent",
      plot_bgcolor: "transparent",
      font: { color: colour("--ink"), size: 12 },
      margin: { l: 45, r: 10, t: layout.showlegend ? 40 : 10, b: 35 },
      legend: { orientation: "h", y: 1, yanchor: "bottom", traceorder: "normal", font: { size: 11 } },
      hoverlabel: { font: { size: 12 } },
    };
  };
  const scale = () => [[0, colour("--raised")], [0.15, "#3b82b8"], [0.5, "#2aa876"], [1, "#f2c14e"]];

  const draw = () => {
    for (const [id, chart] of Object.entries(charts)) {
      const data = chart.data.map((trace) => (trace.type === "heatmap" ? { ...trace, colorscale: scale() } : trace));
      Plotly.react(id, data, dressed(chart.layout), { responsive: true, displayModeBar: false });
    }
  };

  const useTheme = (name) => {
    root.classList.remove("light", "dark");
    root.classList.add(name);
    draw();
  };

  document.getElementById("theme").addEventListener("click", () => {
    useTheme(root.classList.contains("dark") ? "light" : "dark");
  });
  document.getElementById("axis")?.addEventListener("change", (event) => {
    for (const chart of Object.values(charts)) {
      if (!chart.xs) continue;
      chart.data.forEach((trace, at) => { trace.x = chart.xs[event.target.value][at]; });
      chart.layout.xaxis = { title: { text: AXES[event.target.value] } };
    }
    draw();
  });
  for (const choice of document.querySelectorAll(".colouring")) {
    choice.addEventListener("change", (event) => {
      const shown = choice.parentElement.querySelector(".samples");
      shown.classList.toggle("by-version", event.target.value === "version");
      shown.classList.toggle("by-logprob", event.target.value === "logprob");
    });
  }

  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", () => useTheme(dark.matches ? "dark" : "light"));
  useTheme(dark.matches ? "dark" : "light");
})();
