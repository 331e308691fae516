/* SPDX-License-Identifier: MIT */
/*
 * Inserted before the theme's search worker, so that options such as --quick can be searched for:
 * lunr reads a dash before a word as "without this word", and rejects two dashes.
 */
addEventListener("message", ({ data: message }) => {
  if (typeof message.data === "string") {
    message.data = message.data.replace(/(^|\W)-+/g, "$1 ");
  }
});
