/* SPDX-License-Identifier: MIT */
/*
 * Put before the theme's search worker, so that an option is found as it is written: lunr takes a
 * dash before a word for "without this word", and two of them for an error.
 */
addEventListener("message", ({ data: message }) => {
  if (typeof message.data === "string") {
    message.data = message.data.replace(/(^|\W)-+/g, "$1 ");
  }
});
