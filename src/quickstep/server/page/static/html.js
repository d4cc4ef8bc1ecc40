// Preact with htm: components are written as templates, without a build step.
import { h, render } from "./vendor/preact.js";
import htm from "./vendor/htm.js";

export { render };
export * from "./vendor/preact-hooks.js";
export const html = htm.bind(h);
