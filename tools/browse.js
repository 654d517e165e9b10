// What tools/browse.py asks a page. Each answer is a list of complaints, or a number.
window.site = {
  // text, figures and formulas that should be there and are not
  missing() {
    const lost = []
    if (document.querySelector('main').innerText.length < 400) lost.push('text')
    for (const e of document.querySelectorAll('main img'))
      if (e.naturalWidth < 50 || e.getBoundingClientRect().width < 50) lost.push('a figure')
    for (const e of document.querySelectorAll('span.math')) {
      const math = e.querySelector('math')
      if (!math || math.getBoundingClientRect().height < 3) lost.push(`the formula ${e.textContent}`)
    }
    if (document.querySelector('math') && !document.fonts.check('16px "Book Math"'))
      lost.push('the font of formulas')
    return lost
  },

  // elements beyond the right edge, but for those in a box of their own that scrolls
  stickingOut() {
    const scrolls = e => e && (/auto|scroll/.test(getComputedStyle(e).overflowX) || scrolls(e.parentElement))
    const wide = [...document.querySelectorAll('header *, main *, footer *')].filter(e => {
      const box = e.getBoundingClientRect()
      return box.width && box.right > innerWidth + 1 && !scrolls(e.parentElement)
    }).map(e => `${e.tagName} ${e.className}`)
    if (document.documentElement.scrollWidth > innerWidth) wide.push('the page')
    return [...new Set(wide)]
  },

  // contrast of an element's text with what lies behind it, as WCAG 2 defines it
  contrast(element) {
    const paint = new OffscreenCanvas(1, 1).getContext('2d')
    const light = color => {
      paint.fillStyle = color
      paint.fillRect(0, 0, 1, 1)
      const [r, g, b] = [...paint.getImageData(0, 0, 1, 1).data].map(v => v / 255).map(
        v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
      return 0.2126 * r + 0.7152 * g + 0.0722 * b
    }
    const layers = []
    for (let e = element; e; e = e.parentElement) layers.unshift(getComputedStyle(e).backgroundColor)
    const behind = layers.map(light).pop(), text = light(getComputedStyle(element).color)
    return (Math.max(text, behind) + 0.05) / (Math.min(text, behind) + 0.05)
  },
}
