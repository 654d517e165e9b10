"""Look at the built site as a reader would: browse.py FOLDER PICTURES.

Chromium opens every page on a screen as wide as a desk's and on one as wide as a phone's.
Text, figures and formulas must be there, nothing may stick out, no other host may be asked.
Some pages are opened in the dark too, AdamW is searched for, and pictures are kept.
"""
import os
import shutil
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from playwright.sync_api import Error, sync_playwright

SIZES = {'desk': (1280, 900), 'phone': (390, 844)}
FIGURES = {'index': 1, 'adam': 3, 'es': 2, 'api_optim': 0}  # of pages to picture, at least
NAMES = (os.environ.get('CHROMIUM', ''), 'chromium', 'chromium-browser', 'google-chrome')
TEXT = ('main p', 'main p a', 'main pre code', 'main h1')
HIT = ('.search-result-title', '.search-result-section', '.search-result-text', 'mark')


class Quiet(SimpleHTTPRequestHandler):
    "Serves the folder without a line for each request."
    def log_message(self, *args): pass


class Reader:
    "A browser tab on a screen of some size, in light or dark, that collects complaints."
    def __init__(self, browser, home, size, scheme):
        width, height = SIZES[size]
        self.home, self.size, self.scheme, self.wrong = home, size, scheme, []
        context = browser.new_context(
            viewport={'width': width, 'height': height}, color_scheme=scheme,
            permissions=['clipboard-read', 'clipboard-write'])
        context.add_init_script(path=Path(__file__).with_suffix('.js'))
        self.tab = context.new_page()
        self.tab.on('request', self.requested)
        self.tab.on('requestfailed', self.failed)
        self.tab.on('response', self.answered)
        self.tab.on('console', lambda m: self.complain(m.text, m.type == 'error'))
        self.tab.on('pageerror', lambda e: self.complain(str(e)))

    def complain(self, what, really=True):
        page = self.tab.url.removeprefix(self.home)
        if really: self.wrong.append(f'{page}, {self.size}, {self.scheme}: {what}')

    def requested(self, request):
        ours = request.url.startswith((self.home, 'data:'))
        self.complain(f'asks for {request.url}', not ours)

    def answered(self, response):
        self.complain(f'{response.url}: {response.status}', response.status >= 400)

    def failed(self, request):  # aborted is what was still loading when the page was left
        self.complain(f'{request.url}: {request.failure}', 'ABORTED' not in request.failure)

    def count(self, selector): return self.tab.locator(selector).count()

    def keep(self, pictures, name, whole):
        file = pictures/f'{name}-{self.size}-{self.scheme}.png'
        self.tab.screenshot(path=file, full_page=whole)

    def open(self, page):
        "Go to a page and see whether all of it is there."
        self.tab.goto(f'{self.home}{page}.html', wait_until='load')
        self.tab.evaluate('document.fonts.ready')
        for what in self.tab.evaluate('site.missing()'): self.complain(f'{what} is missing')
        self.fits()

    def fits(self):
        for what in self.tab.evaluate('site.stickingOut()'):
            self.complain(f'{what} sticks out')

    def readable(self, selectors):
        "The contrast of normal text should be 4.5 at least."
        for selector in selectors:
            text = self.tab.locator(selector).locator('visible=true').first
            contrast = text.evaluate('e => site.contrast(e)')
            self.complain(f'the contrast of {selector} is {contrast:.1f}', contrast < 4.5)

    def study(self, page, pictures):
        "What only some pages are asked."
        self.open(page)
        self.complain('figures are missing', self.count('main img') < FIGURES[page])
        colab = self.count('a[href*="//colab."]:visible')
        self.complain('no link to Colab', not colab and not page.startswith('api_'))
        self.readable(TEXT)
        self.keep(pictures, page, whole=True)

    def search(self, word, pictures):
        "Type a word, look at what is found, follow the first hit."
        self.open('index')
        if self.size == 'phone': self.tab.locator('.navbar-toggler').click()
        self.tab.get_by_label('Search').locator('visible=true').first.fill(word)
        hit = self.tab.locator('.search-result').first
        hit.wait_for()
        self.tab.wait_for_timeout(500)  # the menu slides open
        self.readable(HIT)
        self.fits()
        self.keep(pictures, 'search', whole=False)
        hit.click()
        self.tab.wait_for_url(lambda url: url != f'{self.home}index.html')
        text = self.tab.locator('main').inner_text()
        self.complain(f'no {word} here', word not in text)

    def copy(self):
        "Code goes to the clipboard when its button is pressed."
        self.open('index')
        block = self.tab.locator('.code-copy-outer-scaffold').first
        block.hover()
        block.locator('.code-copy-button').click()
        copied = self.tab.evaluate('navigator.clipboard.readText()')
        shown = block.locator('pre code').inner_text()
        self.complain('code is not copied', copied != shown)


def browse(browser, home, pages, pictures):
    "All complaints of four readers."
    wrong = []
    for size in SIZES:
        for scheme in ('light', 'dark'):
            reader = Reader(browser, home, size, scheme)
            for page in FIGURES: reader.study(page, pictures)
            reader.search('AdamW', pictures)
            if scheme == 'light':
                for page in pages: reader.open(page)
                if size == 'desk': reader.copy()
            wrong += reader.wrong
    return wrong


def main(folder, pictures):
    "Serve the site, look at it, fail with the complaints."
    program = next(filter(None, map(shutil.which, NAMES)), None)  # else what playwright has
    shutil.rmtree(pictures, ignore_errors=True)
    pictures.mkdir(parents=True)
    server = ThreadingHTTPServer(('127.0.0.1', 0), partial(Quiet, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    pages = [path.stem for path in sorted(folder.glob('*.html'))]
    with sync_playwright() as playwright:
        try: browser = playwright.chromium.launch(executable_path=program)
        except Error as error: sys.exit(f'NOT TESTED, Chromium did not start:\n{error}')
        wrong = browse(browser, f'http://127.0.0.1:{server.server_port}/', pages, pictures)
        print(f'{len(pages)} pages in Chromium {browser.version}, pictures in {pictures}')
        browser.close()
    if wrong: sys.exit('\n'.join(wrong))


if __name__ == '__main__': main(Path(sys.argv[1]), Path(sys.argv[2]))
