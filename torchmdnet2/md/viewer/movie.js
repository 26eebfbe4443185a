// Shows the frames that the page carries: { xyz, times (ps), cell (Å and degrees, or null), style, every }.
(function () {
  const data = JSON.parse(document.getElementById("frames").textContent);
  const [box, slider, button, label] = ["movie", "frame", "play", "time"].map((id) => document.getElementById(id));
  let viewer;
  try {
    viewer = $3Dmol.createViewer(box, { backgroundColor: "white", antialias: true });
    viewer.addModelsAsFrames(data.xyz, "xyz");
  } catch (error) {
    box.textContent = "This browser cannot show the molecule (no WebGL): " + (error.message || error);
    return;
  }
  if (data.cell) {
    viewer.getModel().setCrystData(...data.cell);
    viewer.addUnitCell(viewer.getModel(), { box: { color: "gray" } });
  }
  viewer.setStyle({}, data.style);
  viewer.zoomTo(); // fits the height
  viewer.zoom(Math.min(1, 0.9 * box.clientWidth / box.clientHeight));
  let playing = true, current = 0;
  function show(frame) {
    current = frame;
    slider.value = frame;
    label.textContent = data.times[frame].toFixed(3) + " ps";
    viewer.setFrame(frame).then(() => viewer.render());
  }
  slider.addEventListener("input", () => { stop(); show(Number(slider.value)); });
  button.addEventListener("click", () => { playing ? stop() : start(); });
  function stop() { playing = false; button.textContent = "play"; }
  function start() { playing = true; button.textContent = "pause"; }
  viewer.render();
  show(0);
  setInterval(() => { if (playing) show((current + 1) % data.times.length); }, data.every);
})();
